"""`sharing.py` with tiny models: twelve architectures, trained, exported, loaded by a fresh process."""

import pytest
from sharing import ARCHITECTURES, export, load

from hf_sparse24.checkpoints.export import FORMATS


@pytest.mark.slow
@pytest.mark.usefixtures("dense_math")
def test_twelve_architectures(tmp_path, capsys):
    exports = []
    for name in ARCHITECTURES:
        (tmp_path / name).mkdir()
        exports += export(name, tmp_path / name)
    assert capsys.readouterr().out.count("verified: all") == len(ARCHITECTURES) * len(FORMATS) == 24
    different = [place for place, equal in zip(exports, load(exports)) if not equal]
    assert not different
