"""One environment, every trainer: a file a peer, each importing its peer only when it is used.

An adapter loses nothing in silence: what its peer would drop or rename (a component that may
abstain, a name the peer uses itself) is refused when the adapter is made, not in mid-run.
"""
