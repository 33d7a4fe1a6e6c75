"""Training engines: what `elastic.training` asks of one (`base`), and one package for each."""
