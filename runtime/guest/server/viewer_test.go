package server

import (
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// pacedViewer reads with pauses.
type pacedViewer struct {
	pause  time.Duration // after each viewedPart, which is the time to send it; 0: it never reads
	bursts bool          // it reads all that there is, and then pauses
	misses bool          // it is expected to miss output

	got, skipped int64
}

// viewedPart is what a viewer reads in one pause.
const viewedPart = 32 << 10

// read reads one part, and returns its size.
func (p *pacedViewer) read(v *viewer) int64 {
	part, _ := v.next(make([]byte, viewedPart))
	p.got, p.skipped = p.got+int64(part.n), p.skipped+part.skipped
	return int64(part.n)
}

// readAll reads total bytes.
func (p *pacedViewer) readAll(v *viewer, total int64) {
	for p.got+p.skipped < total {
		n := p.read(v)
		for p.bursts && n == viewedPart && p.got+p.skipped < total {
			n = p.read(v)
		}
		if p.bursts {
			n = viewedPart
		}
		time.Sleep(p.pause * time.Duration(n) / viewedPart)
	}
}

// A program prints 8 MiB. The clock advances only while all wait.
func TestViewersDelayProgramsWithinBounds(t *testing.T) {
	const total, print = 8 << 20, 16 << 10
	for _, tt := range []struct {
		name    string
		pace    time.Duration // of the program, for each 16 KiB
		viewers []pacedViewer
		longest time.Duration // that printing may take
		others  int64         // terminals that wait, too
	}{
		{"one that reads fast enough", 0, []pacedViewer{{pause: 6 * time.Millisecond}}, 256 * 6 * time.Millisecond, 0},
		{"one that is too slow", 0, []pacedViewer{{pause: 200 * time.Millisecond, misses: true}}, maxDelay * 17 / 16, 0},
		{"one that stalls", 0, []pacedViewer{{pause: 3 * time.Second, misses: true}}, maxStall + 50*time.Millisecond, 0},
		{"one that never reads", 0, []pacedViewer{{misses: true}}, maxStall, 0},
		{"one that is too slow for a program with pauses", 10 * time.Millisecond, []pacedViewer{{pause: 100 * time.Millisecond, misses: true}},
			512*10*time.Millisecond*17/16 + maxDelay*17/16, 0},
		{"one that reads in bursts", 10 * time.Millisecond, []pacedViewer{{pause: time.Second, bursts: true, misses: true}},
			512*10*time.Millisecond*4/3 + maxDelay*17/16, 0},
		{"a fast one and one that never reads", 0, []pacedViewer{{pause: 500 * time.Microsecond}, {misses: true}}, 128*time.Millisecond + 2*maxLead, 0},
		{"a fast one and a slow one", 0, []pacedViewer{{pause: 500 * time.Microsecond}, {pause: 200 * time.Millisecond, misses: true}}, 128*time.Millisecond + maxLead, 0},
		{"a fast one and ten slow ones", 0, append([]pacedViewer{{pause: 500 * time.Microsecond}}, slowViewers(10)...), 128*time.Millisecond + 2*maxLead, 0},
		{"equal ones", 0, []pacedViewer{{pause: time.Millisecond}, {pause: time.Millisecond}, {pause: time.Millisecond}}, 256 * time.Millisecond, 0},
		{"one that is more than half as fast", 0, []pacedViewer{{pause: time.Millisecond}, {pause: 1800 * time.Microsecond}}, 256 * 1800 * time.Microsecond, 0},
		{"one that is less than half as fast", 0, []pacedViewer{{pause: time.Millisecond}, {pause: 5 * time.Millisecond, misses: true}}, 256*time.Millisecond + 2*maxLead, 0},
		{"one of a hundred terminals that share 30 MB/s", 0, []pacedViewer{{pause: 109 * time.Millisecond}}, 256 * 109 * time.Millisecond, 99},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				term := &terminal{viewers: map[*viewer]bool{}, waiting: new(atomic.Int64)}
				term.waiting.Store(tt.others)
				term.changed.L = &term.mu
				var reading sync.WaitGroup
				var idle []func()
				for i := range tt.viewers {
					p := &tt.viewers[i]
					v, err := term.join(0)
					if err != nil {
						t.Fatal(err)
					}
					if p.pause > 0 {
						reading.Go(func() { p.readAll(v, total) })
					} else {
						idle = append(idle, func() { p.readAll(v, total) })
					}
				}
				began := time.Now()
				for range total / print {
					time.Sleep(tt.pace)
					term.print(make([]byte, print))
				}
				if took := time.Since(began); took > tt.longest {
					t.Errorf("printing took %s, more than %s", took, tt.longest)
				}
				for _, readAll := range idle {
					readAll()
				}
				reading.Wait()
				for i, p := range tt.viewers {
					if (p.skipped > 0) != p.misses {
						t.Errorf("viewer %d missed %d bytes", i, p.skipped)
					}
				}
			})
		})
	}
}

// slowViewers are viewers with different rates, all of them too low.
func slowViewers(n int) []pacedViewer {
	list := make([]pacedViewer, n)
	for i := range list {
		list[i] = pacedViewer{pause: time.Duration(20+i) * time.Millisecond, misses: true}
	}
	return list
}
