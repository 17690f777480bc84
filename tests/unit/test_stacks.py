"""Where a rank stands, read from what faulthandler writes."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from pathlib import Path

from mpdist import stacks, watch

LIB = "/opt/venv/lib/python3.11/site-packages"
IDLE = """\
Thread 0x00007f5f1affd6c0 (most recent call first):
  File "/usr/lib/python3.11/concurrent/futures/thread.py", line 81 in _worker
  File "/usr/lib/python3.11/threading.py", line 982 in run
  File "/usr/lib/python3.11/threading.py", line 1045 in _bootstrap_inner
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

"""
LOOP = f"""\
  File "{LIB}/mpdist/train.py", line 51 in loop
  File "/usr/lib/python3.11/contextlib.py", line 81 in inner
  File "{LIB}/mpdist/__main__.py", line 48 in <module>
  File "<frozen runpy>", line 88 in _run_code
  File "<frozen runpy>", line 198 in _run_module_as_main
"""
MAIN = "Current thread 0x00007f5f5f27eb80 (most recent call first):\n"
# As FSDP2 on two ranks left it, one of them hanging in a drill; only folders are others.
WAITS = (
    IDLE
    + MAIN
    + f"""\
  File "{LIB}/torch/distributed/distributed_c10d.py", line 4394 in all_gather_single
  File "{LIB}/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "{LIB}/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py", line 119 in __call__
  File "{LIB}/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py", line 364 in foreach_all_gather
  File "{LIB}/torch/utils/_contextlib.py", line 124 in decorate_context
  File "{LIB}/torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py", line 407 in unshard
  File "{LIB}/torch/nn/modules/module.py", line 1811 in inner
  File "{LIB}/mpdist/train.py", line 94 in attempt
"""
    + LOOP
)
HANGS = IDLE + MAIN + f'  File "{LIB}/mpdist/drill.py", line 73 in strike\n' + LOOP
DDP = (
    IDLE
    + MAIN
    + f"""\
  File "{LIB}/mpdist/reduce.py", line 195 in wait
  File "{LIB}/mpdist/shard/ddp.py", line 187 in after_backward
  File "{LIB}/mpdist/train.py", line 112 in attempt
"""
    + LOOP
)


def place(dump: str) -> stacks.Place:
    return stacks.place_in(stacks.threads_in(dump))


def test_a_rank_in_a_collective_waits_and_the_line_of_ours_is_named() -> None:
    found = place(WAITS)
    assert (found.kind, found.text) == ("waits", "all_gather_single in train.attempt (mpdist/train.py:94)")
    assert found.described() == "waiting in all_gather_single in train.attempt (mpdist/train.py:94)"
    found = place(DDP)
    assert (found.kind, found.text) == ("waits", "reduce.wait in shard.ddp.after_backward (mpdist/shard/ddp.py:187)")


def test_a_rank_that_is_elsewhere_shows_its_stack() -> None:
    found = place(HANGS)
    assert (found.kind, found.text) == ("here", "drill.strike (mpdist/drill.py:73)")
    assert found.shown(1).splitlines() == [
        "  rank 1, most recent call first:",
        "    drill.strike (mpdist/drill.py:73)",
        "    train.loop (mpdist/train.py:51)",
        "    inner (contextlib.py:81)",
        "    __main__.<module> (mpdist/__main__.py:48)",
    ]


def test_a_library_is_named_with_the_line_of_ours_that_called_it() -> None:
    read = f'  File "{LIB}/fsspec/spec.py", line 1900 in read\n  File "{LIB}/mpdist/feed.py", line 70 in make\n'
    assert place(MAIN + read + LOOP).text == "read (fsspec/spec.py:1900), called by feed.make (mpdist/feed.py:70)"
    files = f'  File "{LIB}/torch/distributed/checkpoint/filesystem.py", line 9 in _write\n'
    assert place(MAIN + files + LOOP).kind == "here", "writing a checkpoint's files is no collective"


def test_an_operator_is_no_collective_though_torch_passes_both_on() -> None:
    through = f'  File "{LIB}/torch/_ops.py", line 900 in __call__\n'
    wait = f'  File "{LIB}/torch/distributed/_functional_collectives.py", line 300 in wait_tensor\n'
    linear = f'  File "{LIB}/torch/nn/functional.py", line 9 in linear\n'
    assert place(MAIN + through + wait + LOOP).text == "wait_tensor in train.loop (mpdist/train.py:51)"
    found = place(MAIN + through + linear + LOOP)
    assert found.described() == "in linear (torch/nn/functional.py:9), called by train.loop (mpdist/train.py:51)"


def test_of_several_dumps_the_last_one_counts() -> None:
    deep = MAIN + f'  File "{LIB}/mpdist/drill.py", line 73 in strike\n' * 100 + "  ...\n"  # cut off before <module>
    late = (
        'Thread 0x03 (most recent call first):\n  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap\n\n'
    )
    assert place(WAITS + "step 3\n" + late + IDLE + deep).text == "drill.strike (mpdist/drill.py:73)"


def test_the_call_that_the_caller_made_is_named_not_what_it_is_made_of() -> None:
    c10d, log = f"{LIB}/torch/distributed/distributed_c10d.py", f"{LIB}/torch/distributed/c10d_logger.py"
    dump = (
        f'  File "{c10d}", line 4000 in all_gather\n  File "{log}", line 83 in wrapper\n'
        f'  File "{c10d}", line 3000 in all_gather_object\n  File "{log}", line 83 in wrapper\n'
        f'  File "{LIB}/mpdist/dist.py", line 132 in together\n  File "{LIB}/mpdist/restore.py", line 66 in load\n'
    )
    assert place(MAIN + dump + LOOP).text == "all_gather_object in restore.load (mpdist/restore.py:66)"
    start = f'  File "{LIB}/mpdist/dist.py", line 70 in start\n  File "{LIB}/mpdist/session.py", line 86 in set_up\n'
    assert place(MAIN + start + LOOP).described() == "waiting in dist.start in session.set_up (mpdist/session.py:86)"


def test_the_thread_that_the_main_thread_waits_for_is_the_one_to_look_at() -> None:
    waits = '  File "/usr/lib/python3.11/threading.py", line 1119 in join\n'
    gather = f'  File "{LIB}/torch/distributed/distributed_c10d.py", line 4000 in all_gather\n'
    save = f'Thread 0x01 (most recent call first):\n{{}}  File "{LIB}/mpdist/saver.py", line 120 in _write\n'
    main = f'{MAIN}{waits}  File "{LIB}/mpdist/saver.py", line 98 in wait\n{LOOP}'
    found = place(save.format(gather) + "\n" + IDLE + main)
    assert (found.kind, found.text) == ("waits", "all_gather in saver._write (mpdist/saver.py:120)")
    found = place(save.format(f'  File "{LIB}/mpdist/lines.py", line 9 in sync\n') + "\n" + IDLE + main)
    assert (found.kind, found.text) == ("here", "lines.sync (mpdist/lines.py:9)")
    assert "its main thread, most recent call first:\n    join (threading.py:1119)" in found.shown(0)
    # A save in flight says nothing of a rank that hangs in training.
    assert place(save.format(gather) + "\n" + HANGS).text == "drill.strike (mpdist/drill.py:73)"


def test_a_backward_that_autograds_own_thread_runs() -> None:
    hook = f"""\
Thread 0x02 (most recent call first):
  File "{LIB}/torch/distributed/distributed_c10d.py", line 4500 in reduce_scatter_tensor
  File "{LIB}/torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py", line 600 in post_backward

"""
    engine = f"""\
{MAIN}  File "{LIB}/torch/autograd/graph.py", line 800 in _engine_run_backward
  File "{LIB}/torch/_tensor.py", line 600 in backward
  File "{LIB}/mpdist/train.py", line 111 in attempt
"""
    found = place(IDLE + hook + engine + LOOP)
    assert (found.kind, found.text) == ("waits", "reduce_scatter_tensor")
    assert place(IDLE + engine + LOOP).kind == "here", "on a CPU it runs in the main thread"


def test_the_host_that_waits_for_its_device(tmp_path: Path) -> None:
    file = tmp_path / "mpdist" / "train.py"
    file.parent.mkdir()
    file.write_text("def exchange(control):\n    return control.tolist()\n")
    found = place(f'{MAIN}  File "{file}", line 2 in exchange\n{LOOP}')
    assert found.described() == "waiting for the device in train.exchange (mpdist/train.py:2)"


def test_the_collective_of_a_traceback() -> None:
    trace = f"""\
Traceback (most recent call last):
  File "{LIB}/mpdist/train.py", line 133, in exchange
    dist.all_reduce(control)
  File "{LIB}/torch/distributed/c10d_logger.py", line 83, in wrapper
    return func(*args, **kwargs)
           ^^^^^^^^^^^^^^^^^^^^^
  File "{LIB}/torch/distributed/distributed_c10d.py", line 3000, in all_reduce
    work.wait()
RuntimeError: Timed out waiting 8000ms for recv operation to complete
"""
    found = stacks.place_in_trace(trace)
    assert found is not None
    assert found.text == "all_reduce in train.exchange (mpdist/train.py:133)"
    assert stacks.place_in_trace("") is None
    assert stacks.place_in_trace(trace.replace("torch/distributed", "torch/nn")) is None


def blocked(ready: threading.Event, over: threading.Event) -> None:
    ready.set()
    over.wait(60)


def test_a_dump_of_this_python_is_read(tmp_path: Path) -> None:
    ready, over = threading.Event(), threading.Event()
    thread = threading.Thread(target=blocked, args=(ready, over), name="a (name)")
    thread.start()
    ready.wait(60)
    with (tmp_path / "dump").open("w+") as file:
        for _ in range(2):  # of two dumps the last one counts
            faulthandler.dump_traceback(file)
        over.set()
        thread.join()
        text = (tmp_path / "dump").read_text()
    *others, main = stacks.threads_in(text)
    assert [frame.name for other in others for frame in other if frame.file == __file__] == ["blocked"]
    assert main[0].name == "test_a_dump_of_this_python_is_read"
    assert main[0].path.endswith("unit/test_stacks.py")


def report(beat: int, pid: int = 1) -> watch.Report:
    return watch.Report(1, pid, "vm", "1", step=2, attempt=3, doing="train", beat=beat)


def test_an_answer_counts_until_its_rank_moves(tmp_path: Path) -> None:
    log = watch.log_of(tmp_path, 1)
    log.parent.mkdir()
    log.write_text("step 1\n" + WAITS)
    assert stacks.place_of(tmp_path, report(7)) is None, "nobody asked: a user's own dump may be old"
    stacks.write_question(tmp_path, report(7), "no rank has moved")
    assert stacks.place_of(tmp_path, report(7)) is None, "no answer yet"
    log.write_text(log.read_text() + HANGS)
    found = stacks.place_of(tmp_path, report(7))
    assert found is not None
    assert found.kind == "here"
    assert stacks.place_of(tmp_path, report(8)) is None
    stacks.write_silence(tmp_path, report(7, os.getpid()))
    assert "got no answer" not in log.read_text()


def test_a_process_that_cannot_answer(tmp_path: Path) -> None:
    log = watch.log_of(tmp_path, 1)
    log.parent.mkdir()
    own = report(7, os.getpid())
    stacks.write_question(tmp_path, own, "no rank has moved")
    stacks.write_silence(tmp_path, own)
    state = watch.process_state(os.getpid())
    found = stacks.place_of(tmp_path, own)
    assert found is not None
    assert (found.kind, found.text[-9:]) == ("here", f"(state {state})"), "slow, not stopped"
    log.write_text(log.read_text().replace(f"state {state}", "state T"))
    found = stacks.place_of(tmp_path, own)
    assert found is not None
    assert found.kind == "mute"
    assert found.described() == "does not answer the request for its stack (state T: stopped)"


def test_frames_of_a_checkout_are_ours() -> None:
    assert stacks.Frame("/home/me/mpdist/mpdist/shard/ddp.py", 3, "f").called == "shard.ddp.f"
    inside = "/home/me/mpdist/.venv/lib/python3.12/site-packages/torch/nn/linear.py"
    assert stacks.Frame(inside, 3, "f").path == "torch/nn/linear.py"
    assert stacks.Frame(sys.executable, 3, "f").ours is False
