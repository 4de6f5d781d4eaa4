// Graphs: what a stream is given while it captures is kept, and given to a stream as one piece of work when the graph is launched.
#include "streams.h"

using namespace stand_in;

static void end_capture(const std::shared_ptr<Graph>& graph) {
  Held held(lock());
  for (Stream* stream : streams())
    if (stream->capture == graph) stream->capture = nullptr;
}

API cudaStreamIsCapturing(cudaStream_t s, cudaStreamCaptureStatus* status) {
  *status = stream_of(s)->capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
API cudaStreamGetCaptureInfo(cudaStream_t s, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t* graph,
                             const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges, size_t* n) {
  auto capture = stream_of(s)->capture;
  cudaStreamIsCapturing(s, status);
  if (id) *id = capture ? capture->id : 0;
  if (graph) *graph = (cudaGraph_t)capture.get();
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (n) *n = 0;
  return cudaSuccess;
}
API cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode) {
  static std::atomic<unsigned long long> next{1};
  stream_of(s)->capture = std::make_shared<Graph>(Graph{next++});
  return cudaSuccess;
}
API cudaStreamBeginCaptureToGraph(cudaStream_t s, cudaGraph_t, const cudaGraphNode_t*, const cudaGraphEdgeData*, size_t,
                                  cudaStreamCaptureMode mode) {
  return cudaStreamBeginCapture(s, mode);
}
API cudaStreamEndCapture(cudaStream_t s, cudaGraph_t* graph) {
  auto captured = stream_of(s)->capture;
  end_capture(captured);
  *graph = (cudaGraph_t) new std::shared_ptr<Graph>(captured);
  return cudaSuccess;
}
API cudaGraphInstantiateWithFlags(cudaGraphExec_t* ready, cudaGraph_t graph, unsigned long long) {
  *ready = (cudaGraphExec_t) new std::shared_ptr<Graph>(*(std::shared_ptr<Graph>*)graph);
  return cudaSuccess;
}
API cudaGraphLaunch(cudaGraphExec_t ready, cudaStream_t s) {
  count("cudaGraphLaunch");
  auto graph = *(std::shared_ptr<Graph>*)ready;
  double ns = 0;
  for (const Work& node : graph->nodes) ns += node.ns;
  submit(stream_of(s), {[graph] { for (const Work& node : graph->nodes) if (node.run) node.run(); }, ns});
  return cudaSuccess;
}
API cudaGraphDestroy(cudaGraph_t graph) { return delete (std::shared_ptr<Graph>*)graph, cudaSuccess; }
API cudaGraphExecDestroy(cudaGraphExec_t ready) { return delete (std::shared_ptr<Graph>*)ready, cudaSuccess; }
API cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* n) {
  return *n = (*(std::shared_ptr<Graph>*)graph)->nodes.size(), cudaSuccess;
}
API cudaStreamUpdateCaptureDependencies(cudaStream_t, cudaGraphNode_t*, const cudaGraphEdgeData*, size_t, unsigned) { return cudaSuccess; }
API cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
API cudaGraphRetainUserObject(cudaGraph_t, cudaUserObject_t, unsigned, unsigned) { return cudaSuccess; }
API cudaUserObjectCreate(cudaUserObject_t* made, void*, cudaHostFn_t, unsigned, unsigned) { return *made = (cudaUserObject_t)1, cudaSuccess; }
API cudaUserObjectRelease(cudaUserObject_t, unsigned) { return cudaSuccess; }
