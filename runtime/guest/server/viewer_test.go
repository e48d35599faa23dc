package server

import (
	"testing"
	"testing/synctest"
	"time"
)

// A program prints 2 MiB to a viewer that reads a part at each pause.
func TestProgramWaitsForViewersThatKeepUp(t *testing.T) {
	const total = 2 << 20
	for _, tt := range []struct {
		name    string
		pause   time.Duration // 0: the viewer never reads
		skipped bool
		longest time.Duration // that printing may take
	}{
		{"keeps up", viewerPace * 3 / 4, false, viewerPace * 3 / 4 * total / viewerPart},
		{"too slow", viewerPace * 5 / 4, true, 2 * viewerPace},
		{"never reads", 0, true, viewerPace},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				term := &terminal{viewers: map[*viewer]bool{}}
				term.changed.L = &term.mu
				v, err := term.join(0)
				if err != nil {
					t.Fatal(err)
				}
				var got, skipped int64
				read := func() {
					p, _ := v.next(make([]byte, viewerPart))
					got, skipped = got+int64(p.n), skipped+p.skipped
				}
				printed := make(chan time.Duration, 1)
				go func() {
					began := time.Now()
					for range total / terminalRead {
						term.print(make([]byte, terminalRead))
					}
					printed <- time.Since(began)
				}()
				for took := time.Duration(-1); took < 0; {
					var reads <-chan time.Time
					if tt.pause > 0 {
						reads = time.After(tt.pause)
					}
					select {
					case took = <-printed:
						if took > tt.longest {
							t.Errorf("printing took %s, more than %s", took, tt.longest)
						}
					case <-reads:
						read()
					}
				}
				for got+skipped < total {
					read()
				}
				if (skipped > 0) != tt.skipped {
					t.Errorf("%d bytes were skipped", skipped)
				}
			})
		})
	}
}
