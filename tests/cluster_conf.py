"""slurm.conf of a cluster on one machine: neither systemd nor cgroups, several slurmd, quick decisions."""

from __future__ import annotations

import os
from pathlib import Path

_CPUS, _MEMORY_MB = 8, 4000
_CONF = """\
ClusterName=mpdist
SlurmctldHost={host}({controller})
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={run}/munge.sock
CredType=cred/munge
StateSaveLocation={work}/state
SlurmdSpoolDir={run}/spool/%n
SlurmctldPidFile={run}/slurmctld.pid
SlurmdPidFile={run}/slurmd-%n.pid
SlurmctldLogFile={work}/log/slurmctld.log
SlurmdLogFile={work}/log/slurmd-%n.log
# neither cgroups nor systemd
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
# several slurmd on one machine, each claiming more than the hardware has
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
# quick decisions
SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1
KillWait=10
MinJobAge=3600
SlurmctldTimeout=30
SlurmdTimeout=15
# the daemons go before all else on a busy machine, lest a node count as lost; what they start is as nice as its user
PropagatePrioProcess=1
JobRequeue=1
MailProg=/bin/true
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
"""
_PARTITIONS = """\
PartitionName=debug Nodes={nodes} Default=YES MaxTime=60 State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=low Nodes=ALL MaxTime=60 State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=20
PartitionName=high Nodes=ALL MaxTime=60 State=UP PriorityTier=20 PreemptMode=OFF
"""


def text(
    work: Path,
    run: Path,
    host: str,
    controller: str,
    port: int,
    nodes: dict[str, tuple[str, int]],
    apart: dict[str, list[str]],
    gpus: int,
) -> str:
    """nodes: address and port by name. A node's host is called otherwise than the node. controller: its address.

    apart: nodes that are in partitions of their own and not in the default one.
    """
    lines = [_CONF.format(host=host, controller=controller, port=port, run=run, work=work)]
    lines += ["GresTypes=gpu\n"] if gpus else []
    for node, (address, own) in nodes.items():
        gres = f" Gres=gpu:{gpus}" if gpus else ""
        lines.append(
            f"NodeName={node} NodeHostname={node}-host NodeAddr={address} Port={own} "
            f"CPUs={_CPUS} RealMemory={_MEMORY_MB} State=UNKNOWN{gres}\n"
        )
    others = {node for names in apart.values() for node in names}
    lines.append(_PARTITIONS.format(nodes=",".join(node for node in nodes if node not in others)))
    for name, names in apart.items():
        lines.append(
            f"PartitionName={name} Nodes={','.join(names)} MaxTime=60 State=UP PriorityTier=10 PreemptMode=OFF\n"
        )
    return "".join(lines)


def make_gpus(work: Path, gpus: int) -> None:
    """Character devices that are never opened: with them Slurm sets CUDA_VISIBLE_DEVICES."""
    for i in range(gpus):
        os.mknod(work / f"gpu{i}", 0o20666, os.makedev(1, 3))
    names = f"gpu[0-{gpus - 1}]" if gpus > 1 else "gpu0"
    (work / "etc" / "gres.conf").write_text(f"Name=gpu File={work}/{names}\n")
