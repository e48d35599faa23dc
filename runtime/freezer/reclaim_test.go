package freezer

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/doze-run/doze/testkit"
)

// The files describe a cgroup whose memory does not become less.
func TestReclaimRequestsWhatCanBeReclaimed(t *testing.T) {
	const mib = 1 << 20
	for name, c := range map[string]struct {
		anon, file int64
		want       string // of the last request
	}{
		"more than a step":        {150 * mib, 50 * mib, "16777216"},
		"less":                    {2 * mib, mib, "3145728"},
		"memory of the kernel":    {mib / 2, mib/2 - 1, ""},
		"nothing":                 {0, 0, ""},
		"as much as makes a step": {mib, 0, "1048576"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			for file, text := range map[string]string{
				"memory.current": fmt.Sprint(c.anon + c.file + 4*mib), "memory.reclaim": "", "memory.swap.max": "0",
				"memory.stat": fmt.Sprintf("anon 1\nkernel %d\ninactive_anon %d\nactive_anon 0\ninactive_file 0\nactive_file %d\nunevictable %d\n", 4*mib, c.anon, c.file, 8*mib),
			} {
				testkit.NoError(t, file, os.WriteFile(filepath.Join(dir, file), []byte(text+"\n"), 0o600))
			}
			r, err := reclaim(t.Context(), dir)
			testkit.NoError(t, "reclaim", err)
			if r.Before != r.After || r.Before != c.anon+c.file+4*mib {
				t.Errorf("%+v", r)
			}
			for file, want := range map[string]string{"memory.reclaim": c.want, "memory.swap.max": "0"} {
				got, err := os.ReadFile(filepath.Join(dir, file))
				testkit.NoError(t, file, err)
				if first := string(got[:min(len(want), len(got))]); first != want || want == "" && len(got) > 1 {
					t.Errorf("%s has %q, want %q", file, got, want)
				}
			}
		})
	}
}
