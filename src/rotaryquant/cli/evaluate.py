"""`rotaryquant eval NAME …`: hands over to the measurement's own module, or to lm-evaluation-harness."""

from collections.abc import Sequence

from rotaryquant.cli.measurements import Kind
from rotaryquant.errors import ConfigError

_HARNESS = "lm-eval"

EVAL = Kind(
    "eval",
    "rotaryquant.evals",
    "measurement",
    {
        "fidelity": "perplexity, KL divergence and agreement on real text, packed against 16 bits",
        "perplexity": "perplexity at several context lengths, packed and 16-bit",
        "ablate": "what each part of the packed cache is worth: one taken out or replaced at a time",
        "needle": "facts retrieved from a packed context: depths by lengths, judged against 16 bits",
        "ruler": "tasks after RULER on a packed context: keys, values, queries, chains, common words",
        "profile": "where a decode step's time goes, and whether packing pays",
        "rates": "what the parts of a step cost on this machine, for `plan --profile`",
        "stability": "perplexity and speed over full reloads of a model",
        "soak": "hours of conversations: memory, failures, drift",
        "gate": "whether a model with this cache may go out: twelve answers judged against the 16-bit ones",
        _HARNESS: "tasks of lm-evaluation-harness: options of `lm-eval run`, the model is set",
    },
    pictures=True,
)


def run(words: Sequence[str]) -> int:
    """Run the command; returns the exit status. Raises ConfigError."""
    return _harness(words[1:]) if words and words[0] == _HARNESS else EVAL.run(words)


def _harness(words: Sequence[str]) -> int:
    """The harness's own command, which prints as it does."""
    try:
        from rotaryquant.integrations import lm_eval
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "lm_eval":
            raise
        raise ConfigError("lm_eval is not installed; run `pip install 'rotaryquant[lm-eval]'`") from error
    return lm_eval.main(words)
