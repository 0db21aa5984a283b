"""Pruning a trained model in one pass over calibration data.

`oneshot.py` is the public function; it prunes one block of the model after the other:

- `calibration.py`: runs the model up to the next block (`replay.py`) and measures its inputs (`statistics.py`);
  `Block` is one on its way from calibration through pruning to the report
- `prune_layer.py`: new weights of one layer, by `Options`, a criterion (magnitude, Wanda, SparseGPT) and `layerwise.py`
- `blockwise.py`: trains what a block has kept to give the dense block's output
- `finished_blocks.py`: files of pruned blocks, from which an interrupted call goes on
- `report.py`: the result

`own_text.py` lets a model write text to be pruned by.
"""
