//go:build !integration

package main

func asInit() {}
