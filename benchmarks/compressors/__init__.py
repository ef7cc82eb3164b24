"""Parts of bench_compressors.py: methods, cost model, figures, table, plot."""
