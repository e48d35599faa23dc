//go:build integration

package e2e

import (
	"strings"
	"testing"
)

func TestBaseImageHasWhatTheREADMEPromises(t *testing.T) {
	b := commonNode(t).newBox(t)
	has := b.exec(`. /etc/os-release; echo "$ID $VERSION_ID"; python3 --version; node --version; git --version; curl --version`)
	for _, want := range []string{"debian 13\n", "\nPython 3.13.", "\nv20.", "\ngit version ", "\ncurl "} {
		if !strings.Contains(has, want) {
			t.Errorf("no %q in %s", want, has)
		}
	}
}
