"""Measuring the engine: workloads, a client, figures, and the comparison with a peer.

Imports everything below it; nothing imports it but the command line.
"""
