"""Benchmarks: `python -m bench.bench_<thing>`, with `--smoke` on a machine without a GPU."""
