"""`rotaryquant bench NAME …`: hands over to the benchmark's own module."""

from rotaryquant.cli.measurements import Kind

BENCH = Kind(
    "bench",
    "rotaryquant.bench",
    "benchmark",
    {
        "attention": "one-token attention on packed codes against torch's attention on exact rows",
        "matmul": "few tokens times packed weights against torch's product",
        "experts": "a layer of routed experts on packed weights against torch's products",
        "append": "packing keys and values, by rotation",
        "decode": "tokens per second of a model, packed cache against transformers' own",
    },
)
run = BENCH.run
