"""What every part may use: times, processors, the exchange of arrays by DLPack, messages over a socket."""
