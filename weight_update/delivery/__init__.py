"""From a source of weights to every engine: what both faces assemble."""
