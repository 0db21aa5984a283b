"""Philox 4x32-7: random numbers as a pure function of a key and a counter.

The same numbers on every device, whatever the launch grid, the thread count, or what ran before. Seven rounds are the
fewest that pass BigCrush (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", Table 2).
"""

import torch
from torch import Tensor

ROUNDS = 7
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


def uniform(key: Tensor, groups: int, vectors: int, draw: int = 0) -> Tensor:
    """fp32 `[groups, vectors]` in [0, 1), multiples of 2^-24: one number for each group of each vector.

    The counter is (vector // 4, group, draw, 0); its four results are for four neighbouring vectors. `key` is an int64
    scalar; each `draw` gives independent numbers for the same group.
    """
    shape, device = (groups, (vectors + 3) // 4), key.device
    c0 = torch.arange(shape[1], device=device).expand(shape).clone()
    c1 = torch.arange(groups, device=device).unsqueeze(1).expand(shape).clone()
    words = philox(c0, c1, torch.full_like(c0, draw), torch.zeros_like(c0), key & _LOW, key >> 32 & _LOW)
    numbers = torch.stack([word.bitwise_right_shift_(8).float() for word in words], -1)
    return numbers.mul_(2.0**-24).view(groups, 4 * shape[1])[:, :vectors]


def philox(c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, k0: Tensor, k1: Tensor) -> tuple[Tensor, ...]:
    """Four counters (overwritten) and two keys -> four results: words of 32 bits, all held in int64.

    In int64, because torch has no unsigned 32-bit multiplication that gives the high half. Bit 63 of the result may be
    set, so its high half is masked after the (arithmetic) shift. In place, because on a CPU fresh memory costs more
    than the arithmetic.
    """
    first, second = torch.empty_like(c0), torch.empty_like(c0)
    for _ in range(ROUNDS):
        torch.mul(c0, _MULTIPLIERS[0], out=first)
        torch.mul(c2, _MULTIPLIERS[1], out=second)
        torch.bitwise_right_shift(second, 32, out=c0).bitwise_and_(_LOW).bitwise_xor_(c1).bitwise_xor_(k0)
        torch.bitwise_right_shift(first, 32, out=c2).bitwise_and_(_LOW).bitwise_xor_(c3).bitwise_xor_(k1)
        torch.bitwise_and(second, _LOW, out=c1)
        torch.bitwise_and(first, _LOW, out=c3)
        k0, k1 = k0 + _WEYL[0] & _LOW, k1 + _WEYL[1] & _LOW
    return c0, c1, c2, c3
