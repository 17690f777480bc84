"""Runs beside each other: at matched steps and at matched train seconds, with an uncertainty, or refused.

    read      what a run left behind, as it stands               -> tree.Run
    whole     whether its histories hold what its counters say
    arms      which runs are one arm, who is the reference         -> tree.Arm
    fairness  what differs and is not the treatment                -> tree.Difference
    fed       whether runs of a seed began and were fed alike      (a part of fairness)
    figures   one arm's own figures                                -> tree.Arm
    windows   train seconds and tokens window by window            (speed and its spread)
    match     the same step, the same second, the same loss
    intervals intervals, power, drift: scipy's
    pairs     one arm against the reference                        -> tree.Pair
    defects   what a record cannot show unless something is wrong  -> tree.Defect
    verdict, gates, guide                                          -> words, exit status, advice
    text, report                                                   tree.Comparison as a table, as JSON

Nothing here imports torch; scipy and numpy are imported where they are used.
"""
