"""A run as one self-contained HTML file: a pure function of its journal, without scripts and without network."""
