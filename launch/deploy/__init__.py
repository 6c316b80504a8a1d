"""What other launchers need to run Tidemill: charts, files for schedulers, and the programs behind them."""
