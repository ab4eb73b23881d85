"""Gradients summed over trainers with 16 bits a number on the wire, and error feedback.

What rounding leaves over is the residual. It is added to the next gradient, so that in the long run nothing is lost
(Seide et al., 2014; Karimireddy et al., 2019). A sum takes two rounds, each over all connections at once:

    1. Trainer r cuts gradient + residual into T chunks, rounds chunk t and sends it to trainer t. What rounding left
       over is its residual for that chunk.
    2. Trainer t adds the chunks that it received, in float32, to its own unrounded chunk; rounds the sum and sends it
       to all. What this rounding left over is added to its residual for chunk t.

All trainers take the rounded sums, the owner of a chunk too, so all have the same bits. Each trainer keeps a residual
of one float32 for every number of the gradient. A compressed sum differs from the exact one by the sum of all
residuals after it, less the sum of all residuals before it.

What follows the gradient (loss, weight, counts, flags) travels with the second round in float32 and is added by rank.

A trainer sends 4 (T - 1) / T bytes for every number: half of a float32 ring, and no scheme with 16 bits needs fewer.

Legend: T trainers, N numbers of the gradient, L numbers of a chunk (the last is padded), M exact numbers behind them.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paddlewheel.trainer.distributed.process_group import ProcessGroup
from paddlewheel.trainer.job.train import WireType

Floats = NDArray[np.float32]
Words = NDArray[np.uint16]


class CompressedSum:
    """Sums one gradient a step. All trainers make the same calls.

    Args:
        peers: the trainers; at least two.
        num_floats: N.
        wire: bfloat16 (8 bits of mantissa, float32's range) or float16 (11 bits; each message is scaled by a power of
            two to its largest number, so that nothing overflows).
    """

    def __init__(self, peers: ProcessGroup, num_floats: int, wire: WireType) -> None:
        self._peers, self._num_floats = peers, num_floats
        assert wire != "float32", "a sum without rounding needs no feedback"
        self._codec: _Codec = _Bfloat16() if wire == "bfloat16" else _Float16()
        num_trainers = peers.num_trainers
        shape = (num_trainers, -(-num_floats // num_trainers))
        self._owed_TL, self._left_TL = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        self._due_TL, self._spare_L = np.zeros(shape, np.float32), np.zeros(shape[1], np.float32)

    @property
    def owed_N(self) -> Floats:
        """What this trainer's roundings have left over, as of the last `keep`."""
        return self._owed_TL.reshape(-1)[: self._num_floats]

    def all_reduce(self, gradient_N: Floats, exact_M: Floats) -> None:
        """Both over all trainers, in place; `exact_M` without rounding. What is residual changes with `keep` alone.

        All numbers of the gradient must be finite, and so small that float32 can hold their squares.

        Raises:
            PeerLostError: a trainer is gone.
        """
        rank, codec, num_chunk = self._peers.rank, self._codec, self._due_TL.shape[1]
        others = [t for t in range(self._peers.num_trainers) if t != rank]
        due_TL, left_TL, spare_L = self._due_TL, self._left_TL, self._spare_L
        np.add(gradient_N, self.owed_N, out=due_TL.reshape(-1)[: self._num_floats])

        sent = {t: self._rounded(due_TL[t], left_TL[t]) for t in others}
        came = {t: np.empty(1 + num_chunk, np.uint16) for t in others}
        self._peers.all_to_all(sent, came)
        mine_L = due_TL[rank]
        for message in came.values():
            codec.unpack(message, spare_L)
            mine_L += spare_L

        own = np.concatenate([self._rounded(mine_L, left_TL[rank]), exact_M.view(np.uint16)])
        shares = {t: np.empty_like(own) for t in others}
        self._peers.all_to_all(dict.fromkeys(others, own), shares)
        shares[rank] = own
        exact_M[:] = 0.0
        for t in range(self._peers.num_trainers):
            codec.unpack(shares[t][: 1 + num_chunk], due_TL[t])
            exact_M += shares[t][1 + num_chunk :].copy().view(np.float32)
        gradient_N[:] = due_TL.reshape(-1)[: self._num_floats]

    def keep(self) -> None:
        """Commit the residual of the last all-reduce.

        If the step is skipped, do not call this: the old residual stays.
        """
        self._owed_TL, self._left_TL = self._left_TL, self._owed_TL

    def _rounded(self, values_L: Floats, left_L: Floats) -> Words:
        """Packed; `left_L` receives what rounding leaves over."""
        message = self._codec.pack(values_L)
        self._codec.unpack(message, left_L)
        np.subtract(values_L, left_L, out=left_L)
        return message


class _Codec(Protocol):
    """A message of 1 + L words and back."""

    def pack(self, values_L: Floats) -> Words:
        """Round to 16 bits."""
        ...

    def unpack(self, message: Words, values_L: Floats) -> None:
        """Fill `values_L`."""
        ...


class _Bfloat16:
    """The upper half of a float32, rounded to the nearest, ties to even. The first word is not used."""

    def pack(self, values_L: Floats) -> Words:
        bits_L = values_L.view(np.uint32)
        rounded_L = bits_L >> 16
        rounded_L &= 1
        rounded_L += 0x7FFF
        rounded_L += bits_L
        message: Words = np.empty(1 + len(values_L), np.uint16)
        message[0] = 0
        message[1:] = rounded_L.view(np.uint16)[1::2]  # little-endian
        return message

    def unpack(self, message: Words, values_L: Floats) -> None:
        bits_L = values_L.view(np.uint32)
        bits_L[:] = message[1:]
        bits_L <<= 16


class _Float16:
    """float16 of values times a power of two, whose exponent is the first word: the largest lies in [2^14, 2^15)."""

    def pack(self, values_L: Floats) -> Words:
        largest = max(float(values_L.max(initial=0.0)), -float(values_L.min(initial=0.0)))
        exponent = max(-100, math.frexp(largest)[1])  # beyond that the factor would be no float32
        message: Words = np.empty(1 + len(values_L), np.uint16)
        message[:1].view(np.int16)[0] = exponent
        message[1:].view(np.float16)[:] = values_L * np.float32(2.0 ** (15 - exponent))
        return message

    def unpack(self, message: Words, values_L: Floats) -> None:
        exponent = int(message[:1].view(np.int16)[0])
        values_L[:] = message[1:].view(np.float16)
        values_L *= np.float32(2.0 ** (exponent - 15))
