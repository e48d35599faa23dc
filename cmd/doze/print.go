package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/cmd/internal/display"
)

// print returns err, or else prints v: a line of text, or with --json its JSON.
func (a *app) print(err error, v any, format string, args ...any) error {
	switch {
	case err != nil:
		return err
	case a.json:
		return a.printJSON(v)
	}
	_, err = fmt.Fprintln(a.out, clean(fmt.Sprintf(format, args...)))
	return err
}

// printJSON prints v as the API wrote it, indented.
func (a *app) printJSON(v any) error { return display.JSON(a.out, v, "  ") }

// printItem prints an item of a stream: its text, or with --json one line of JSON.
func printItem[T any](a *app, item T, text func(T) string) error {
	if a.json {
		return display.JSON(a.out, item, "")
	}
	_, err := fmt.Fprintln(a.out, text(item))
	return err
}

// printItems prints the texts of a list, or with --json an object with the list.
func printItems[T any](a *app, name string, list []T, text func(T) string) error {
	if a.json {
		return a.printJSON(map[string]any{name: list})
	}
	for _, item := range list {
		if err := printItem(a, item, text); err != nil {
			return err
		}
	}
	return nil
}

// printTable prints a row for each item of a list below the heads, or with --json an object
// with the list.
func printTable[T any](a *app, name string, list []T, heads []any, row func(T) []any) error {
	if a.json {
		return a.printJSON(map[string]any{name: list})
	}
	t := newTable(a.out, heads...)
	for _, item := range list {
		t.row(row(item)...)
	}
	return t.flush()
}

// listCommand is a command that prints what the node lists under a name.
func listCommand[T any](a *app, name, short string, list func(*client.Client, context.Context) ([]T, error), heads []any, row func(T) []any) *cobra.Command {
	return &cobra.Command{
		Use:   "ls",
		Short: short,
		Args:  wants(0, 0),
		RunE: a.withNode(func(ctx context.Context, node *client.Client, _ []string) error {
			items, err := list(node, ctx)
			if err != nil {
				return err
			}
			return printTable(a, name, items, heads, row)
		}),
	}
}

// timeline is a line about what happened at a moment, after that many lines that were lost.
func timeline(at time.Time, lost uint64, format string, cells ...any) string {
	for i, cell := range cells {
		cells[i] = clean(fmt.Sprint(cell))
	}
	line := at.Local().Format("2006-01-02 15:04:05.000") + "  " + strings.TrimRight(fmt.Sprintf(format, cells...), " ")
	if lost > 0 {
		line = fmt.Sprintf("… %d more, omitted because they came too fast\n%s", lost, line)
	}
	return line
}

// details collects what is known of something, to be printed in one line.
type details []string

func (d *details) add(known bool, format string, args ...any) {
	if known {
		*d = append(*d, fmt.Sprintf(format, args...))
	}
}

func (d details) String() string { return strings.Join(d, ", ") }

// indent writes the lines of a text, each after a prefix.
func indent(w io.Writer, prefix, text string) (err error) {
	for line := range strings.Lines(text) {
		_, err = fmt.Fprintf(w, "%s%s\n", prefix, clean(strings.TrimRight(line, "\r\n")))
	}
	return err
}

// texts returns a text for each item of a list.
func texts[T any](list []T, text func(T) string) []string {
	var all []string
	for _, item := range list {
		all = append(all, text(item))
	}
	return all
}

// last returns the end of a list, so many long; 0 is all of it.
func last[T any](list []T, n int) []T {
	if n <= 0 || len(list) <= n {
		return list
	}
	return list[len(list)-n:]
}

// table aligns rows of cells.
type table struct {
	w *tabwriter.Writer
}

func newTable(w io.Writer, heads ...any) *table {
	t := &table{tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)}
	if len(heads) > 0 {
		t.row(heads...)
	}
	return t
}

func (t *table) row(cells ...any) {
	line := strings.Join(texts(cells, func(cell any) string { return clean(fmt.Sprint(cell)) }), "\t")
	fmt.Fprintln(t.w, strings.TrimRight(line, "\t"))
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
	return strings.NewReplacer("h0m0s", "h", "m0s", "m").Replace(d.String())
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
