"""The transformer that is trained: loaded, quantised, given adapters, spread over processes, averaged, exported."""
