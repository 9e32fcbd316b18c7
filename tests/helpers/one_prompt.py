"""One prompt as the arrays that the library's functions take."""

import numpy as np


def batch(ids, width=64):
    tokens = np.zeros((1, width), np.int32)
    tokens[0, : len(ids)] = ids
    return tokens, np.array([len(ids)], np.int32)
