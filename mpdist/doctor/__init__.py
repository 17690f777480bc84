"""`mpdist doctor`: what is wrong with this machine, or with a configuration on it, before anything is trained.

here        this machine by itself: devices, versions, limits, how fast it multiplies in which dtype
asked       what a configuration needs of it, without torch: memory, sizes, space, what the hub holds, keys
examine     the steps, taken by one process or by all ranks of a world together
command     the command: starts the ranks, gathers what they found, prints it, worst first
"""

PATIENCE_S = 120.0  # for a node, a rank or a collective: a patient is there, or it is not
