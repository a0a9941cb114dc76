"""A machine whose bytes are damaged in mid-run is named on every other machine, with the reason, within seconds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roundelay.transport import envelope as envelopes
from tests.peers.told_run import hosted

TAMPERS = """
from roundelay.transport import envelope
from roundelay.transport.grpc_link import GrpcLink

write_message, seal, sent = GrpcLink._write_message, envelope.seal, 0

def flipped(piece):
    return piece[:-1] + bytes([piece[-1] ^ 1])

def replayed(piece):
    head, body = envelope.unseal(piece)
    return seal(head.kind, head.generation, head.sequence - 1, [body], head.total)

async def tampered(self, write, frame, apart):
    global sent
    sent += self.worker == VICTIM and len(frame) > 4000
    if sent == 50:
        sent, whole = 51, write
        write = lambda piece: whole(WHAT(piece))
    await write_message(self, write, frame, apart)

GrpcLink._write_message = tampered
"""
"""After fifty messages with tensors to one other machine, one piece is not what it was when it was sealed."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("victim", "what", "reason"), [(0, "flipped", envelopes.DAMAGED), (2, "replayed", envelopes.REPLAYED)]
)
def test_one_damaged_piece_ends_the_run_by_its_sender_s_name(
    victim: int, what: str, reason: str, tmp_path: Path
) -> None:
    """It comes to the host, which writes the refusal down, or to another machine, which tells it."""
    tampers = TAMPERS.replace("VICTIM", str(victim)).replace("WHAT", what)
    with hosted(tmp_path, 10_000) as run:
        for k, invitation in enumerate(run.invitations, 1):
            run.joiners.append(run.join(invitation, f"joiner {k}", tampers if k == 1 else ""))
        assert run.end() == [1, 1, 1], run.told()
    for name in ("host", "joiner 2"):
        (line,) = [line for line in run.told(name).splitlines() if line.startswith("lost: ")]
        assert line == f"lost: worker-1: it sent bytes that are no message ({reason})"
        assert "Traceback" not in run.told(name)
    written = [json.loads(line) for line in (run.out / "refused.jsonl").read_text().splitlines()]
    refused = [(line["peer"], line["reason"]) for line in written]
    assert refused == ([("worker-1", reason)] if victim == 0 else [])
    assert (f"Refused worker-1: {reason}." in run.told("joiner 2")) == (victim == 2)
