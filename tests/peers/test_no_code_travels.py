"""A machine that joins needs no job file, opens no Python but what is installed, and neither sends nor gets pickles."""

from __future__ import annotations

import re
import shutil
import sysconfig
from pathlib import Path

import pytest

from tests.peers.told_run import ROOT, hosted

MARK = "/the-call-Join-begins"

MARKS = f"""
from roundelay.cli import join_command
knock = join_command.knock

def marked(*given):
    try:
        open({MARK!r})
    except OSError:
        return knock(*given)

join_command.knock = marked
"""
"""What a joiner runs so that its trace of system calls tells when Join begins."""

NOTES = """
from roundelay.peers import member_store, knock
from roundelay.transport import envelope
from roundelay.transport import wire_format as wire
notes = open("../wire", "w", buffering=1)
seal, unseal, called, taken = envelope.seal, envelope.unseal, knock._call, member_store.MemberStore._taken

def note(what, body):
    print(what, bytes(body[:24]).hex(), file=notes)

def noted_seal(kind, generation, sequence, parts, total=1):
    body = b"".join(parts)
    note("out", body)
    note("tensors out", body[wire.HEAD_BYTES:])
    return seal(kind, generation, sequence, parts, total)

def noted_unseal(piece):
    head, body = unseal(piece)
    note("in", body)
    note("tensors in", body[wire.HEAD_BYTES:])
    return head, body

def noted_call(reached, root, join, timeout):
    note("Join", knock.encode(join))
    answer = called(reached, root, join, timeout)
    note("welcome", answer)
    return answer

async def noted_taken(self, name, *given):
    data = await taken(self, name, *given)
    note(name, data)
    return data

envelope.seal, envelope.unseal, knock._call = noted_seal, noted_unseal, noted_call
member_store.MemberStore._taken = noted_taken
"""
"""What a joiner runs that notes how everything begins that it sends and gets, before it is encrypted."""

PICKLED = re.compile(rb"\A\x80[\x02-\x05]|\A\(d|\A[cl]__?builtin")
MARSHALLED = re.compile(rb"\A[\xe3c]\x00{3}|\A.{0,16}\xe3\x00{4}", re.DOTALL)
OPENED = re.compile(r'open(?:at)?\((?:AT_FDCWD, )?"([^"]+)"[^\n]*= (-?\d+)')


def after_join(trace: str) -> list[str]:
    """Files of Python that were opened after the call Join had begun."""
    assert MARK in trace
    return [name for name, fd in OPENED.findall(trace.partition(MARK)[2]) if name.endswith(".py") and int(fd) >= 0]


@pytest.mark.timeout(400)
def test_a_joiner_opens_no_python_of_the_host_s_and_no_pickle_travels(tmp_path: Path) -> None:
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("needs strace, which the system's packages have")
    traced = [strace, "-f", "-qq", "-e", "trace=open,openat", "-o", str(tmp_path / "trace")]
    with hosted(tmp_path, 40) as run:
        run.joiners.append(run.join(run.invitations[0], "joiner 1", MARKS, under=traced))
        run.joiners.append(run.join(run.invitations[1], "joiner 2", NOTES))
        assert run.end() == [0, 0, 0], run.told() + run.told("joiner 1") + run.told("joiner 2")
    trace = (tmp_path / "trace").read_text(errors="replace")
    libraries = [ROOT / "src", *map(Path, {sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")})]
    assert [name for name in after_join(trace) if not any(Path(name).is_relative_to(own) for own in libraries)] == []
    assert not re.search(r'(?<!roundelay)[/"]job\.py"', trace)
    assert [*(tmp_path / "joiner 1").iterdir()] == [*(tmp_path / "joiner 2").iterdir()] == []
    wire = [line.rpartition(" ")[::2] for line in (tmp_path / "wire").read_text().splitlines()]
    kinds = {what for what, _ in wire}
    assert kinds == {"Join", "verdict", "welcome", "assignment", "state", "in", "out", "tensors in", "tensors out"}
    assert len(wire) > 200
    bodies = {bytes.fromhex(body) for _, body in wire}
    assert [body for body in bodies if PICKLED.search(body) or MARSHALLED.search(body)] == []


def test_what_would_be_a_pickle_is_seen() -> None:
    """Guards the guard."""
    import marshal
    import pickle

    for protocol in range(2, 6):
        assert PICKLED.search(pickle.dumps({"a": print}, protocol))
    assert MARSHALLED.search(marshal.dumps(compile("1", "x", "eval")))
    assert after_join(
        f'1 openat(AT_FDCWD, "a.py") = 3\n1 open("{MARK}") = -1\n1 openat(AT_FDCWD, "/x/b.py") = 4\n'
    ) == ["/x/b.py"]
