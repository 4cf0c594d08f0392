"""Launcher of paged_attention.cu."""

def rejects(problem):
    return "paged attention is not implemented yet"


def variants(problem):
    return [{}]
