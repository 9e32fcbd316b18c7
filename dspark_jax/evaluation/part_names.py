"""The parts of a speculative round by name, known without loading JAX.

  round    everything: draft, verify, commit, observe
  plain    one token of plain decoding
  draft    the drafter's pass, base logits included
  markov   the K sequential draws
  target   the target's pass over K + 1 tokens, logits included
  verdict  sampling distributions, verification and commit
  observe  the drafter's context features of the fed tokens

The last five make up a round. `round_parts` builds them.
"""

ROUND_PARTS = ("draft", "markov", "target", "verdict", "observe")
PARTS = ("round", "plain", *ROUND_PARTS)
