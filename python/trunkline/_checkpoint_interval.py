"""How often to save a checkpoint on accelerators that fail, and how fast saving must be.

The model is that of J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart
dumps", Future Generation Computer Systems 22 (2006). Failures come at random, at a mean time `mtbf` apart. A
training computes for `interval`, stops for `save` to save, and after a failure begins again at the last
checkpoint once `restart` has passed. All are seconds.
"""

import math

_ROUNDS = 200  # of halving


def young_interval(save: float, mtbf: float) -> float:
    """Return the time to compute between saves by Young (1974): the first-order optimum."""
    return math.sqrt(2 * save * mtbf)


def daly_interval(save: float, mtbf: float) -> float:
    """Return the time to compute between saves that loses the least, by Daly (2006), equation 37."""
    if save >= 2 * mtbf:
        return mtbf
    ratio = save / (2 * mtbf)
    return math.sqrt(2 * save * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save


def lost_share(interval: float, save: float, mtbf: float, restart: float) -> float:
    """Return the share of the time that is not progress: saving, computing again, restarting."""
    exponent = (interval + save) / mtbf
    if exponent + restart / mtbf > 700:  # e^700 is about the largest number
        return 1.0
    wall = mtbf * math.exp(restart / mtbf) * math.expm1(exponent)  # to get `interval` done
    return 1 - interval / wall


def lost_work(interval: float, save: float, mtbf: float) -> float:
    """Return how much of the computing a failure undoes on average: what came after the last save.

    The mean of min(t, interval) over the times t, from the end of that save, at which a failure comes before
    the end of the next one: they are distributed as exp(-t / mtbf) / mtbf.
    """
    none_until_saved = math.exp(-(interval + save) / mtbf)
    mean = -mtbf * math.expm1(-interval / mtbf) - interval * none_until_saved
    return mean / -math.expm1(-(interval + save) / mtbf)


def longest_save(budget: float, mtbf: float, restart: float) -> float | None:
    """Return the longest save with which the best interval loses at most `budget`, a share of the time.

    None if restarting alone loses more.
    """
    if 1 - math.exp(-restart / mtbf) >= budget:
        return None
    low, high = 0.0, mtbf
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        if lost_share(daly_interval(middle, mtbf), middle, mtbf, restart) <= budget:
            low = middle
        else:
            high = middle
    return low or None
