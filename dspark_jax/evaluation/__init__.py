"""Evaluation of drafters: recorded rounds, acceptance, reliability, wall clock."""
