// Package replay drives the real router and the real index with traces against modelled
// engines: a deterministic discrete-event simulation. It answers which policy is best for a
// workload, in one process and without a GPU. Absolute times depend on the engine model;
// rankings and ratios carry over. The same options give the same report, byte for byte.
//
//	s, err := replay.LoadScenario("skew")
//	o, err := s.Options(&s.Cases[0], nil)
//	o.Seeds = []uint64{1, 2, 3}
//	report, err := replay.Run(o)
//	report.WriteTable(os.Stdout)
package replay
