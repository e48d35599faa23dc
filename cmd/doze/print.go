package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"golang.org/x/term"

	"github.com/doze-run/doze/cmd/internal/display"
)

// printJSON prints v as the API wrote it, indented.
func (a *app) printJSON(v any) error { return a.encode(v, "  ") }

// printLine prints v as one line of JSON, for streams.
func (a *app) printLine(v any) error { return a.encode(v, "") }

func (a *app) encode(v any, indent string) error { return display.JSON(a.out, v, indent) }

// table aligns rows of cells.
type table struct {
	w *tabwriter.Writer
}

func newTable(w io.Writer, heads ...string) *table {
	t := &table{tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)}
	if len(heads) > 0 {
		t.row(heads...)
	}
	return t
}

func (t *table) row(cells ...string) {
	for i := range cells {
		cells[i] = clean(cells[i])
	}
	fmt.Fprintln(t.w, strings.TrimRight(strings.Join(cells, "\t"), "\t"))
}

func (t *table) flush() error { return t.w.Flush() }

// clean is display.Clean for text and enumerations.
func clean[T ~string](s T) string { return display.Clean(string(s)) }

// age is a span of time in its largest unit: 5s, 2m, 3h, 4d.
func age(d time.Duration) string {
	switch {
	case d < time.Second:
		return "0s"
	case d < time.Minute:
		return fmt.Sprintf("%ds", d/time.Second)
	case d < time.Hour:
		return fmt.Sprintf("%dm", d/time.Minute)
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", d/time.Hour)
	}
	return fmt.Sprintf("%dd", d/(24*time.Hour))
}

// ago is the age of a moment, or a hyphen for none.
func ago(at time.Time) string {
	if at.IsZero() {
		return "-"
	}
	return age(time.Since(at))
}

// span is a configured duration: 1m, 24h, 90s; never for 0.
func span(d time.Duration) string {
	if d == 0 {
		return "never"
	}
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}

// size is a number of bytes, such as 1.2 MiB.
func size(n int64) string {
	if n < 1024 {
		return fmt.Sprintf("%d B", n)
	}
	value, unit := float64(n)/1024, 0
	for value >= 1023.95 && unit < 4 {
		value /= 1024
		unit++
	}
	return fmt.Sprintf("%.1f %ciB", value, "KMGTP"[unit])
}

// milliseconds is a time that the API gave, such as 0.3ms, 42ms or 1.5s.
func milliseconds(ms float64) string {
	switch {
	case ms < 10:
		return fmt.Sprintf("%.2gms", ms)
	case ms < 1000:
		return fmt.Sprintf("%.0fms", ms)
	}
	return fmt.Sprintf("%.1fs", ms/1000)
}

// cpuTime is an amount of CPU time, such as 0.42s or 1h2m3s.
func cpuTime(seconds float64) string {
	if seconds < 60 {
		return fmt.Sprintf("%.2fs", seconds)
	}
	return time.Duration(seconds * float64(time.Second)).Truncate(time.Second).String()
}

// orDash is s, or a hyphen where a cell would be empty.
func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

// isTerminal reports whether w is a terminal.
func isTerminal(w any) bool {
	f, ok := w.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

// sizeOf is the size of a terminal, or the usual one where it has none.
func sizeOf(screen *os.File) (width, height int) {
	width, height, err := term.GetSize(int(screen.Fd()))
	if err != nil || width < 1 || height < 1 {
		return 80, 24
	}
	return width, height
}

// cutTo is the beginning of a line, so many columns long.
func cutTo(line string, columns int) string {
	if runes := []rune(line); len(runes) > columns {
		return string(runes[:columns])
	}
	return line
}

// isBrokenPipe reports whether the reader of the output has ended.
func isBrokenPipe(err error) bool { return errors.Is(err, syscall.EPIPE) }
