"""`rotaryquant eval NAME …`: hands over to the measurement's own module."""

from rotaryquant.cli.measurements import Kind

EVAL = Kind(
    "eval",
    "rotaryquant.evals",
    "measurement",
    {
        "fidelity": "perplexity, KL divergence and agreement on real text, packed against 16 bits",
        "perplexity": "perplexity at several context lengths, packed and 16-bit",
        "ablate": "what each part of the packed cache is worth: one taken out or replaced at a time",
        "needle": "facts retrieved from a packed context",
        "profile": "where a decode step's time goes, and whether packing pays",
        "stability": "perplexity and speed over full reloads of a model",
        "soak": "hours of conversations: memory, failures, drift",
        "gate": "whether a model with this cache may go out: twelve answers judged against the 16-bit ones",
    },
    text_columns=1,
)
run = EVAL.run
