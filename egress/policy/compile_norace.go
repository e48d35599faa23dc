//go:build !race

package policy

// shadow is how many times more memory a program takes than without a race detector.
const shadow = 1
