"""Host lists in each form that Slurm writes, and the names that they stand for."""

from __future__ import annotations

FORMS: list[tuple[str, list[str]]] = [
    ("", []),
    ("login", ["login"]),
    ("n[1-3,07-09]", ["n1", "n2", "n3", "n07", "n08", "n09"]),
    ("a-b[0-1]x[2-3]", ["a-b0x2", "a-b0x3", "a-b1x2", "a-b1x3"]),
    ("n[098-101]", ["n098", "n099", "n100", "n101"]),
    ("n[9-11],m[1],login", ["n9", "n10", "n11", "m1", "login"]),
    ("n[1-2]-ib", ["n1-ib", "n2-ib"]),
    ("n[1-2].cluster.example.org,x", ["n1.cluster.example.org", "n2.cluster.example.org", "x"]),
    ("r[1-2][8-9]", ["r18", "r19", "r28", "r29"]),
    # Slurm lets the second bracket of three vary slowest.
    ("a[1-2]b[3-4]c[5-6]", ["a1b3c5", "a1b3c6", "a2b3c5", "a2b3c6", "a1b4c5", "a1b4c6", "a2b4c5", "a2b4c6"]),
    ("n1 n2\nn3", ["n1", "n2", "n3"]),
    ("n[1,1]", ["n1", "n1"]),
]
