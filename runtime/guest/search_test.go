package guest

import (
	"testing"
)

// FuzzRipgrepOutput: whatever a program named rg writes, in whatever pieces, the results are
// bounded.
func FuzzRipgrepOutput(f *testing.F) {
	f.Add([]byte(`{"type":"match","data":{"path":{"text":"./a"},"lines":{"text":"x\n"},"line_number":1,"submatches":[{"start":0}]}}`+"\n"), 7)
	f.Add([]byte("{}\n\n\x00"), 1)
	f.Fuzz(func(t *testing.T, output []byte, piece int) {
		p := ripgrepOutput{folder: "/srv", limit: 2}
		for len(output) > 0 {
			n := min(max(piece, 1), len(output))
			if p.write(output[:n]) != nil {
				break
			}
			output = output[n:]
		}
		if len(p.result.Matches) > 2 || len(p.line) > maxRipgrepLine {
			t.Errorf("%d matches, %d bytes of a line", len(p.result.Matches), len(p.line))
		}
		for _, m := range p.result.Matches {
			if m.Line < 1 || m.Column < 1 || len(m.Path) > maxSearchPath || len(m.Text) > 3*MaxMatchText {
				t.Errorf("%+v", m)
			}
		}
	})
}
