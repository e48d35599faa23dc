//go:build !race

package policy

import "testing"

func TestMemoryOfAThousandReplacements(t *testing.T) {
	grown, requests := replace(t, newHost(t, func(c *Config) { c.CacheDir = "" }), responder(), 1000, 2)
	t.Logf("%d requests, grown by %d KiB", requests, grown>>10)
	if grown > 20<<20 {
		t.Errorf("the process has grown by %d MiB", grown>>20)
	}
}
