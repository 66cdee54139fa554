"""One conversation with a model: loading, decoding, sampling, saving."""
