"""Every scenario computes the bits that were recorded before the last change that had to keep them."""

import json

import bit_equality
import pytest
import torch

pytestmark = pytest.mark.slow
RECORDED = json.loads(bit_equality.RECORD.read_text())


@pytest.fixture(scope="module")
def found():
    return bit_equality.measure()


@pytest.mark.parametrize("scenario", bit_equality.SCENARIOS)
def test_bits(scenario, found):
    """The same hashes with the recorded versions of torch and Transformers on the recorded CPU. Elsewhere the norms are
    compared where hashes differ, since CPUs and versions may round differently."""
    differ = [name for name, fact in RECORDED["facts"].items() if name != "commit" and found["facts"][name] != fact]
    wrong = bit_equality.differences(
        RECORDED["scenarios"].get(scenario, {}), found["scenarios"][scenario], exact=not differ
    )
    assert not wrong, f"facts that differ: {differ}"


def test_a_changed_bit_is_found():
    """One bit of one weight in the middle of a scenario, whose norm stays as it is to nine digits."""
    parts, other, weight = bit_equality.Parts(), bit_equality.Parts(), torch.randn(64, 64)
    parts.add("weight", {"a": [weight, 1.0]})
    weight[3, 5] = weight[3, 5].nextafter(torch.tensor(9.0))
    other.add("weight", {"b": [weight, 1.0]})
    assert bit_equality.differences(parts.found, other.found)
    assert not bit_equality.differences(parts.found, other.found, exact=False)
    assert bit_equality.differences(parts.found, {}, exact=False) == ["weight: missing or new"]
