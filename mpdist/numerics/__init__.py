"""What float formats do to numbers, shown on the host in NumPy: rounding to any of them, and a lab that trains in them."""
