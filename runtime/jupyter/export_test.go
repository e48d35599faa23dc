package jupyter

import "encoding/json"

// Publications returns the events of an execution for which a kernel publishes a message a
// number of times, and whose reader never reads.
func Publications(limit int, kind string, content []byte, times int) ([]Event, error) {
	k := &Kernel{slot: make(chan struct{}, 1)}
	k.slot <- struct{}{}
	x := &Execution{k: k, limit: limit, done: make(chan struct{}), changed: make(chan struct{}, 1)}
	defer x.end()
	for range times {
		if err := x.onPublished(Message{Header: Header{Type: kind}, Content: json.RawMessage(content)}); err != nil {
			return nil, err
		}
	}
	return x.queue, nil
}
