"""Training of drafters for a frozen target: anchors, losses, steps, data and runs.

A step runs the target over a batch of its own texts, samples anchors among the tokens
that it wrote, drafts a block at every anchor in one pass and compares each slot's
distribution with the target's (0.1 CE + 0.9 L1 + 1.0 BCE of the confidence, paper
section 3.3). `step.train_step` is a pure function that several drafters can share.
`texts` is where the texts come from (written by the target, or read), `runs` takes all
of this to the end of a run, which `dspark train` starts.
"""
