"""`mpdist doctor`: what is wrong with this machine, or with a configuration on it, before anything is trained.

here        this machine by itself: devices, versions, limits, how fast it multiplies in which dtype
asked       what a configuration needs of it, without torch: memory, sizes, space, what the hub holds, keys
examine     the steps, taken by one process or by all ranks of a world together
before      what shows of a run's numbers without training: labels, updates that would round away (stuck)
sequence    the debugging sequence: trial makes the steps, judge and extremes read them, cures are tried
command     the command: starts the ranks, gathers what they found, prints it, worst first
"""

PATIENCE_S = 120.0  # for a node, a rank or a collective: a patient is there, or it is not
TRIAL_STEPS = 8  # of the debugging sequence, in each precision, where nobody says otherwise
