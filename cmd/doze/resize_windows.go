package main

import "os"

// notifyResized does nothing: consoles of Windows send no signal when their size
// changes, and the next tick redraws.
func notifyResized(chan<- os.Signal) {}
