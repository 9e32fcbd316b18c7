"""What the host decides from numbers; nothing here imports more than numpy.

Public: `planner` (the paper's Algorithm 1), `budgets` and `relay` (budgets from earlier
steps' confidences), `costs`, `online_costs` and `cost_files` (step times),
`calibration`.
"""
