"""A plan becomes work done: prepared once for a device, run as often as wanted.

`prepared` joins a plan, its memory (`memory`) and a way to run it: `serial`, `parallel`, `graph` or
`megakernel`. `watching` feeds a profiler, `guarding` looks for writes out of bounds. The launches
themselves run in the core.
"""
