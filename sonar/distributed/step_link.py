"""The lead's batches to the other ranks, and a later stage's results back to it: typed messages over frames.

Every step has a number; a rank that gets another one than is due raises, which ends the incarnation. Called by the
worker's executor and followers. Torch-free.
"""

from __future__ import annotations

import msgspec

from sonar.distributed.frames import FrameReader, FrameWriter
from sonar.errors import ProtocolError
from sonar.messages import EndOfSteps, GroupBatches, LeadToRank, StepBatch, StepResult

# A rank that does not take a message for so long hangs. The head's own deadline for a hung engine is about as long.
SEND_TIMEOUT_S = 60.0


class StepSender:
    """The lead's end."""

    def __init__(self, writer: FrameWriter, incarnation: int) -> None:
        self._writer = writer
        self._incarnation = incarnation
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, batch: StepBatch) -> None:
        """Hands a step to every rank, whichever group it is of. Raises `ProtocolError` when one does not take it."""
        self._writer.write(self._encoder.encode(_as_sent(batch, self._encoder)), SEND_TIMEOUT_S)

    def close(self) -> None:
        """Tells the ranks that no step follows."""
        self._writer.write(self._encoder.encode(EndOfSteps(incarnation=self._incarnation)), SEND_TIMEOUT_S)
        self._writer.close()


def _as_sent(batch: StepBatch, encoder: msgspec.msgpack.Encoder) -> StepBatch | GroupBatches:
    if not batch.others:
        return batch
    batches = [msgspec.structs.replace(batch, others=[]), *batch.others]
    encoded = [msgspec.Raw(encoder.encode(one)) for one in batches]
    return GroupBatches(incarnation=batch.incarnation, step=batch.step, batches=encoded)


class StepReceiver:
    """A follower's end. group: of the data-parallel ones, that of this rank."""

    def __init__(self, reader: FrameReader, incarnation: int, group: int = 0) -> None:
        self._reader = reader
        self._incarnation = incarnation
        self._group = group
        self._next_step = 0
        self._decoder = msgspec.msgpack.Decoder(LeadToRank)
        self._batch_decoder = msgspec.msgpack.Decoder(StepBatch)

    def receive(self, timeout_s: float) -> StepBatch | EndOfSteps | None:
        """This rank's part of the next message; None when none came within the time.

        Raises:
            ProtocolError: it does not follow the one before, or is no message of this incarnation.
        """
        frame = self._reader.read(timeout_s)
        if frame is None:
            return None
        try:
            message: LeadToRank = self._decoder.decode(frame)
            if isinstance(message, GroupBatches):
                message = self._batch_decoder.decode(message.batches[self._group])
        except (msgspec.MsgspecError, IndexError) as error:
            raise ProtocolError(f"the lead sent junk where step {self._next_step} was due: {error}") from error
        if message.incarnation != self._incarnation:
            raise ProtocolError(f"a message of incarnation {message.incarnation} in incarnation {self._incarnation}")
        assert not isinstance(message, GroupBatches)
        if not isinstance(message, EndOfSteps):
            if message.step != self._next_step:
                raise ProtocolError(f"step {message.step} came where {self._next_step} was due")
            self._next_step += 1
        return message

    def close(self) -> None:
        """Frees the channel here."""
        self._reader.close()


class ResultSender:
    """The end of the rank that draws, when that is not the lead."""

    def __init__(self, writer: FrameWriter) -> None:
        self._writer = writer
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, result: StepResult) -> None:
        """Hands a result to the lead. Raises `ProtocolError` when it does not take it."""
        self._writer.write(self._encoder.encode(result), SEND_TIMEOUT_S)

    def close(self) -> None:
        """Frees the channel here."""
        self._writer.close()


class ResultReceiver:
    """The lead's end for results."""

    def __init__(self, reader: FrameReader) -> None:
        self._reader = reader
        self._decoder = msgspec.msgpack.Decoder(StepResult)

    def receive(self, timeout_s: float) -> StepResult | None:
        """The next result; None when none came within the time. Raises `ProtocolError` for junk."""
        frame = self._reader.read(timeout_s)
        if frame is None:
            return None
        try:
            return self._decoder.decode(frame)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"a rank sent junk for a result: {error}") from error

    def close(self) -> None:
        """Frees the channel here."""
        self._reader.close()
