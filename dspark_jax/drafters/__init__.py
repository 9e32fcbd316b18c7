"""Drafters: DSpark (DFlash backbone, Markov and confidence heads) and prompt lookup."""
