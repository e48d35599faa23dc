// Package cgroup checks which sandbox a process belongs to.
package cgroup

import "bytes"

// Contains reports whether a process is in the cgroup want or below it, by the v2 line of its /proc/PID/cgroup.
func Contains(want string, cgroups []byte) bool {
	for line := range bytes.Lines(cgroups) {
		if path, ok := bytes.CutPrefix(bytes.TrimSuffix(line, []byte("\n")), []byte("0::")); ok {
			below, ok := bytes.CutPrefix(path, []byte(want))
			return ok && (len(below) == 0 || below[0] == '/')
		}
	}
	return false
}
