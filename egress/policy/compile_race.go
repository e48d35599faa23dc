//go:build race

package policy

// shadow is how many times more memory a program takes: the race detector has a
// shadow of the heap.
const shadow = 8
