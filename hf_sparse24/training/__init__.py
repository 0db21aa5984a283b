"""Training: what happens between steps, in a loop of your own or in any Trainer.

controller.py       Sparse24Controller: phases, state, gradients and random streams, around each optimizer step
step_masks.py       masks and state of the weights in a step, flip rates, MVUE's random streams
optimizers.py       the optimizer as the controller follows it, and its checks
zero.py             the same for DeepSpeed ZeRO-1 and ZeRO-2
checks.py           refusals before training starts: engines, processes that differ, TRL's reference models
callback.py         Sparse24Callback: the controller in any Trainer
trainer.py          Sparse24Trainer: patching, the method's optimizer and the decay search in one line
resume.py           checkpoints of a Trainer: whole, of this run, and in which phase
run_log.py          RunLog: all figures of a run in one file
decay_search.py     masked_decay="auto": probes of the warm-up
distillation.py     a teacher's predictions as a second target
"""
