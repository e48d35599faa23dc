// Package policytest has what tests of policies share.
package policytest

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"runtime/debug"
)

// BuildCompiler builds a program for policy.Config.Compiler into a folder and returns
// its path. It has no race detector, with which compiling takes eight times the memory
// and time, and each compiler a second to end.
func BuildCompiler(dir string) (string, error) {
	file := filepath.Join(dir, "compiler")
	build := exec.Command("go", "build", "-race=false", "-buildvcs=false", "-ldflags=-X github.com/tetratelabs/wazero/internal/version.version="+wazeroVersion(),
		"-o", file, "github.com/doze-run/doze/egress/policy/policytest/compiler")
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build the compiler of policies: %w\n%s", err, out)
	}
	return file, nil
}

// wazeroVersion is wazero's version as wazero finds it in this program. Tests of most
// packages have no build information, and code is loaded only by the version that
// compiled it.
func wazeroVersion() string {
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, dep := range info.Deps {
			if dep.Path == "github.com/tetratelabs/wazero" {
				return dep.Version
			}
		}
	}
	return "dev"
}
