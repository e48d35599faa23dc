package main

// inForeground reports whether this program may read its terminal, which every
// program of Windows may.
func inForeground(int) bool { return true }
